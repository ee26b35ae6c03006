"""Training programs drawn at random, run on several ranks and in one process: see __main__.py."""
