"""Trainings with one planted fault each, and a judge of what profilers say about them."""
