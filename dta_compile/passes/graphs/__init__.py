"""Shared by all passes: properties of operators, predicates of nodes, sizes, storage, subgraphs, and minimum cuts."""
