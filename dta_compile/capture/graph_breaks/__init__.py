"""Graph breaks of Dynamo that a trace for the tree avoids."""
