"""Runs the library's protocols and training steps on simulated ranks, in orders that seeds decide."""
