"""`thinwire start --local`: a whole swarm in processes of this machine, and its evaluation at the end."""
