"""What machine this is and which libraries it has."""
