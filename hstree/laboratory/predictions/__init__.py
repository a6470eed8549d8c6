"""What models expect next: their most probable words in a context, side by side."""
