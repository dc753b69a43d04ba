"""What the backend has Dynamo do differently while it traces, and what passes ask of the running trace."""
