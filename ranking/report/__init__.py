"""What happened, in one HTML file."""
