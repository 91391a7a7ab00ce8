"""Parts of the reports of a peer: alarms of lineages, its part in rounds, and plan and outcome."""
