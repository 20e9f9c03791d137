"""Where an attempt starts: afresh, from a checkpoint of the run or of another, and what becomes of what lies there."""
