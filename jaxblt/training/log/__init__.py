"""What a run says while it trains: its log, trackers, speed, pictures and text."""
