"""A package, so that it comes before a `tests` that some other package (verl) installs."""
