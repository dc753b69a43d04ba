"""One prefix tree over several ranks: each computes its pieces, and reads states of others (see `plan.one_tree`)."""
