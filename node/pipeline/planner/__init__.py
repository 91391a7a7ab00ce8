"""Planner of micro-batch routes: an annealing search over simulated steps, and how a plan is shown."""
