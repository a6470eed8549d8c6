"""What do the trees of an ensemble do: which words are together, and where does the loss arise?"""
