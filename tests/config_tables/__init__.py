"""Every public config: what it needs to be made, and values that it refuses."""
