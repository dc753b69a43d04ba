"""Code that inductor generates for pieces of graphs, during calls or by a background process; cached on disk."""
