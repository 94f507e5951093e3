"""The progress bar: tqdm's for notebooks where it can be shown, else its plain one."""

import warnings

from tqdm import TqdmWarning

with warnings.catch_warnings():
    # Keep a notebook without ipywidgets from warning: its bar is then plain text.
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

__all__ = ["tqdm"]
