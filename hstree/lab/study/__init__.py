"""Studies: grids of training runs, described by a file, summarized in one table."""
