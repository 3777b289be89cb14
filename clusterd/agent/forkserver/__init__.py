"""Fork servers: parents of ranks with torch already imported, one per environment."""
