"""Port mapping: requests to the router in three protocols, and the renewal of what it grants."""
