import program_cost


def test_table_has_the_costs_of_a_small_model(capsys):
    program_cost.main(["small", "--batch", "2"])
    output = capsys.readouterr().out
    assert "as trained" in output
    assert output.count(" s ") >= len(program_cost.COLUMNS)
