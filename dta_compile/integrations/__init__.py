"""What other packages are given: functions of ours under their interfaces, and stand-ins while Dynamo traces."""
