"""Return on spend: response curves of campaigns, and budgets that follow marginal return."""
