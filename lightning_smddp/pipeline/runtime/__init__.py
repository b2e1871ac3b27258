"""What a rank does in a step: schedules, stages, and the messages between them."""
