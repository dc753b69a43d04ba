"""What Dynamo hands over: every private touch of it, and what kind of graph was captured."""
