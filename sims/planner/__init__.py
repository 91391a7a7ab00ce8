"""Planner behind `thinwire plan`: what rounds of each method would cost on given links."""
