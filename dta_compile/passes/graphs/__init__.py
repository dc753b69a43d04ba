"""What passes share: properties of operators, questions about nodes, sizes and storage, subgraphs, and minimum cuts."""
