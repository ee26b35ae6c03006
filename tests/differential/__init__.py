"""Random training programs on several ranks, compared with one process: see __main__.py."""
