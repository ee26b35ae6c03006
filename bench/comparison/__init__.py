"""What compare.py keeps of its runs, and the tables and the picture that it makes of them."""
