"""Which of several models predicts a token."""
