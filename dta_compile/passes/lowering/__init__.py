"""Lower Dynamo's graph to a functional graph of ATen operators."""
