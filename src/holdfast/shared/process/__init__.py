"""What every process does alike: its start and its end, signs of life, whose modules it imports."""
