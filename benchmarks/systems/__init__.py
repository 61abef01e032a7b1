"""Questions about time, memory and traffic: what replicas, averages and searches cost."""
