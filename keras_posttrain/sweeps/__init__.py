"""Sweeps: a function run over a grid of settings, and the table of it."""
