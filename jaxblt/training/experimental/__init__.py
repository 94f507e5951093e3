"""What trains routers of adapters: rewards, policies, banks of experts."""
