"""Does one figure of a model go with another, such as the rank of log P with perplexity?"""
