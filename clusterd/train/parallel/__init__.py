"""A parallel plan applied to a model and its optimizer with torch's own facilities."""
