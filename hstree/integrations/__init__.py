"""Heads in the libraries of others: a module each, which alone imports that library."""
