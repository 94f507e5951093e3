"""Compiles every Mosaic GPU kernel for an H200 on a machine without a GPU: `make gpu-compile`."""
