"""What is known of a run while it goes on, from its files alone, and how it is shown: for launcher and `monitor`."""
