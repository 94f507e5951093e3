"""Weight updates: sites, products with them, and how stacks get them."""
