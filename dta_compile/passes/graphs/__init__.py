"""What passes share: questions about nodes, sizes and storage, and minimum cuts."""
