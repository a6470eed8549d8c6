"""The reference language model: texts, models, runs, training, the command line."""
