"""Bridges to layers of other projects and to ours, and the measurement that holds each to what it promises.

A bridge is a function that imports its package itself. What it promises is what its documentation says.
"""
