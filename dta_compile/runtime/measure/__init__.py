"""What is measured of machine and runs: times, the cost model's rates, the memory that may be used."""
