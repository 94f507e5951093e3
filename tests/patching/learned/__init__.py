"""Learned boundaries."""
