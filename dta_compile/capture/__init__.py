"""Everything between Dynamo and the passes: uses of Dynamo's private parts, classification and rewrites of graphs."""
