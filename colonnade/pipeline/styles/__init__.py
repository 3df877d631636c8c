"""The styles: each file writes the lists of actions of one schedule, and says where its idea is from."""
