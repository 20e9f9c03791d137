"""What users type: the commands, and the launcher behind them. Nothing else imports it."""
