"""The code of an adapter: routers, what they read, how often they speak, and what is done to a code."""
