"""Measurements of machine and runs: times, rates of the cost model, available memory."""
