"""What builds the site from docs/: pages that are read off the code, and links that hold outside of the repository."""
