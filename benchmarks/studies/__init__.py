"""What the studies of benchmarks share: planned runs, one file of records, and pages made of it."""
