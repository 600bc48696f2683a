package main

import (
	"math"
	"math/rand"
	"strings"
	"testing"
)

type problem struct {
	n             Sizes
	o             Options
	q, k, v, dout []float32
}

func randoms(r *rand.Rand, n int) []float32 {
	data := make([]float32, n)
	for i := range data {
		data[i] = 2*r.Float32() - 1
	}
	return data
}

func randomProblem(r *rand.Rand) problem {
	kv := 1 + r.Intn(3)
	dim, dimV := 8*(1+r.Intn(5)), 8*(1+r.Intn(5))
	n := Sizes{1 + r.Intn(2), kv * (1 + r.Intn(3)), kv, 1 + r.Intn(30), 1 + r.Intn(30), dim, dimV}
	keys, rows := n.Batch*n.Keys*n.HeadsKV, n.Batch*n.Rows*n.Heads
	return problem{n, Options{r.Intn(2) == 0, r.Intn(3) * 4}, randoms(r, rows*n.HeadDim), randoms(r, keys*n.HeadDim),
		randoms(r, keys*n.HeadDimV), randoms(r, rows*n.HeadDimV)}
}

// In float64: out, lse, dq, dk and dv.
func (p problem) loops() [5][]float64 {
	n := p.n
	out, lse := make([]float64, len(p.dout)), make([]float64, n.Batch*n.Heads*n.Rows)
	dq, dk, dv := make([]float64, len(p.q)), make([]float64, len(p.k)), make([]float64, len(p.v))
	scale := 1 / math.Sqrt(float64(n.HeadDim))
	for item := range lse {
		b, h, row := item/(n.Heads*n.Rows), item/n.Rows%n.Heads, item%n.Rows
		ofQ := (b*n.Rows+row)*n.Heads + h
		ofK := func(key int) int { return (b*n.Keys+key)*n.HeadsKV + h/(n.Heads/n.HeadsKV) }
		dot := func(x, y []float32, i, j, width int) (sum float64) {
			for c := 0; c < width; c++ {
				sum += float64(x[i*width+c]) * float64(y[j*width+c])
			}
			return sum
		}
		weights, sum, delta := map[int]float64{}, 0.0, 0.0
		for key := 0; key < n.Keys; key++ {
			place := key - (row + n.Keys - n.Rows)
			if !(p.o.Causal && place > 0) && !(p.o.Window > 0 && place < -p.o.Window) {
				weights[key] = math.Exp(scale * dot(p.q, p.k, ofQ, ofK(key), n.HeadDim))
				sum += weights[key]
			}
		}
		lse[item] = math.Inf(1)
		if sum > 0 {
			lse[item] = math.Log(sum)
		}
		for key, weight := range weights {
			for c := 0; c < n.HeadDimV; c++ {
				out[ofQ*n.HeadDimV+c] += weight / sum * float64(p.v[ofK(key)*n.HeadDimV+c])
			}
			delta += weight / sum * dot(p.dout, p.v, ofQ, ofK(key), n.HeadDimV)
		}
		for key, weight := range weights {
			ds := weight / sum * (dot(p.dout, p.v, ofQ, ofK(key), n.HeadDimV) - delta)
			for c := 0; c < n.HeadDim; c++ {
				dq[ofQ*n.HeadDim+c] += scale * ds * float64(p.k[ofK(key)*n.HeadDim+c])
				dk[ofK(key)*n.HeadDim+c] += scale * ds * float64(p.q[ofQ*n.HeadDim+c])
			}
			for c := 0; c < n.HeadDimV; c++ {
				dv[ofK(key)*n.HeadDimV+c] += weight / sum * float64(p.dout[ofQ*n.HeadDimV+c])
			}
		}
	}
	return [5][]float64{out, lse, dq, dk, dv}
}

func TestIsThatOfLoops(t *testing.T) {
	r := rand.New(rand.NewSource(1))
	for number := 0; number < 40; number++ {
		p := randomProblem(r)
		out, lse, err := Forward(p.n, p.o, p.q, p.k, p.v)
		if err != nil {
			t.Fatal(err)
		}
		dq, dk, dv, err := Backward(p.n, p.o, p.q, p.k, p.v, out, lse, p.dout)
		if err != nil {
			t.Fatal(err)
		}
		wanted := p.loops()
		for i, found := range [5][]float32{out, lse, dq, dk, dv} {
			if len(found) != len(wanted[i]) {
				t.Fatalf("problem %d: %d has %d elements, not %d", number, i, len(found), len(wanted[i]))
			}
			for at, want := range wanted[i] {
				if have := float64(found[at]); have != want && !(math.Abs(have-want) <= 2e-5*(1+math.Abs(want))) {
					t.Fatalf("problem %d, %+v %+v: %s[%d] is %g, not %g", number, p.n, p.o,
						[]string{"out", "lse", "dq", "dk", "dv"}[i], at, have, want)
				}
			}
		}
	}
}

func TestWrongInputIsAnError(t *testing.T) {
	p := randomProblem(rand.New(rand.NewSource(2)))
	out, lse, _ := Forward(p.n, p.o, p.q, p.k, p.v)
	said := func(err error, word string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("'%v' does not name %s", err, word)
		}
	}
	_, _, err := Forward(p.n, p.o, p.q[1:], p.k, p.v)
	said(err, "q, k and v")
	_, _, err = Forward(Sizes{}, p.o, nil, nil, nil)
	said(err, "size of 0")
	_, _, _, err = Backward(p.n, p.o, p.q, p.k, p.v, out, lse, p.dout[1:])
	said(err, "dout")
	_, _, err = Forward(p.n, Options{Window: -2}, p.q, p.k, p.v)
	said(err, "window is (-2, -1)")
	_, _, err = Forward(Sizes{1, 3, 2, 1, 1, 1, 1}, p.o, p.q[:3], p.k[:2], p.v[:2])
	said(err, "heads")
}
